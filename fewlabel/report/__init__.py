"""What came out of runs: results, comparisons, tables, plots, the page, the terminal, trackers."""
