"""Figures, in three layers: data, chart descriptions, renderers.

- ``data``: what is drawn, such as predictions over the values of a field; no layout and no colours.
- ``charts``: one module per figure; each returns a chart description of ``chart``.
- ``render``: chart descriptions as ECharts options for a page, or as PNG and SVG files with matplotlib.

``registry`` lists the figures of ``shapewright plot`` by name.
"""
