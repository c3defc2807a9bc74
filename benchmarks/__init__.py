"""Speed and memory, ours against peers, in one run: `python -m benchmarks`, and `python -m benchmarks table` for the page."""
