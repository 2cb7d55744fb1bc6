"""python -m shapewright: the command line."""

from shapewright.app.cli import main

if __name__ == "__main__":
    main()
