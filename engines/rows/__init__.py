"""Engines of row programs. `by_row`: a CTA for some rows; `persistent`: CTAs that take row after row; `across`: a CTA
for neighbouring rows of tensors in which these lie side by side."""
