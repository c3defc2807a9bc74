"""Speed and memory, ours against peers, in one run: `python -m offmap_bench.speed`, and `python -m offmap_bench.speed table` for the page."""
