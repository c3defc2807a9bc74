"""How a distribution is found: objectives, one training loop, the closed form, monitors and selection."""
