"""The command line: parse, call, print. Nothing is computed here."""

from shapewright.app.cli.main import main as main
