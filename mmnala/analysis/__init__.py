"""What the paper's figures show, for any model: attention, contributions, features, complexity."""
