"""The command line: parse, call, print. Nothing is computed here."""

from shapewright.cli.main import main as main
