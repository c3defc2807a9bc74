"""Speed and memory beside other libraries: `python -m offmap_bench.speed` measures, `... table` writes the page."""
