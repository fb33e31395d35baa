"""How much a page may hold: beyond, a stated part is shown."""

from __future__ import annotations

MOST_ROWS = 64  # ranks in a timeline
MOST_STEPS = 8  # steps with a timeline
MOST_BOXES = 3000  # of one timeline; about 100 bytes each
MOST_RANK_FILES = 256  # traces read of a run
MOST_POINTS = 400  # of a curve
MOST_BARS = 64  # of a bar chart
MOST_DOTS = 1500  # of the scatter of predicted and measured
