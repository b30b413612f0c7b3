"""Engines of row programs. `by_row`: a CTA for some rows; `persistent`: CTAs that take row after row."""
