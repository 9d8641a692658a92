"""Lexically constrained beam search: outputs contain required phrases (Post & Vilar 2018; Hu et al. 2019)."""
