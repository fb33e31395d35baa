"""One HTML page of a run or a plan: what is known is gathered first, then drawn; nothing is fetched."""
