"""Tasks: familiar data to train, validate and test on, and strange data to be told apart from them."""
