"""Accuracy: predictions against measured tables, priced as the package prices, nothing fitted on the way."""

from shapewright.accuracy.judge import Accuracy as Accuracy
from shapewright.accuracy.judge import Judgement as Judgement
from shapewright.accuracy.judge import judge_folder as judge_folder
from shapewright.accuracy.tables import TABLES as TABLES
