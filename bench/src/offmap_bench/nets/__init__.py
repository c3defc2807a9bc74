"""Small reference hosts."""
