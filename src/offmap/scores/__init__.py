"""What is out-of-distribution: uncertainty of draws, distances to training rows, and how they are combined."""
