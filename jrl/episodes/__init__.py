"""Episodes of many turns: environments, chat templates, tools and the engine that plays them."""
