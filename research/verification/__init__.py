"""Compare published numbers with ours: checks are rows of a YAML file, each with its data, model and measure."""
