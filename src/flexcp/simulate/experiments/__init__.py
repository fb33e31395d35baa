"""The published experiments, one file each, run on the cost model: published numbers beside ours."""
