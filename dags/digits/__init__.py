"""Handwritten digits: a small model, trained on all hosts of all slices and served from one slice."""
