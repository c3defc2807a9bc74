"""An exported guard behind HTTP: scores, health, metrics and a live page."""
