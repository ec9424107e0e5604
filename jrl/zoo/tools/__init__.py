"""Tools that environments offer, and commands of one use."""
