"""Shapewright inside other programs: tools of coding agents, callbacks of trainers, comments on pull requests."""
