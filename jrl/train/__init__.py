"""Training: the state, the compiled step, collecting rollouts, and the loop around them."""
