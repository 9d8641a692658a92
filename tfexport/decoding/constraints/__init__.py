"""Lexically constrained beam search: outputs that have required phrases (Post & Vilar 2018; Hu et al. 2019)."""
