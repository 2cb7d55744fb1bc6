"""Compare predictions with measured tables, priced as in any prediction; nothing is fitted."""

from shapewright.measure.accuracy.evaluate import Accuracy as Accuracy
from shapewright.measure.accuracy.evaluate import Evaluation as Evaluation
from shapewright.measure.accuracy.evaluate import evaluate_folder as evaluate_folder
from shapewright.measure.accuracy.tables.registry import TABLES as TABLES
