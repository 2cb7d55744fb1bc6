"""Figures as plain data: what is to be drawn, without a word on how."""
