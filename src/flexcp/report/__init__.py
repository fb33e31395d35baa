"""How plans look: tables, a terminal timeline, an SVG. Turns values into drawings and prints nothing."""
