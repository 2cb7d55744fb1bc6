"""Figures: charts of measured rows and predictions on the same axes, as plain descriptions that any page can draw."""

from shapewright.report.figures.figure import FIGURE_NAMES as FIGURE_NAMES
from shapewright.report.figures.figure import FigureRequest as FigureRequest
from shapewright.report.figures.figure import draw_figure as draw_figure
from shapewright.report.figures.samples import Sample as Sample
from shapewright.report.figures.samples import samples_of as samples_of
