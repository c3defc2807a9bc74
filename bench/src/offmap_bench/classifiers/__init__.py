"""Image classifiers that are trained to tell what they do not know."""
