"""Geometry of charts: waterfall, flow chart, bars."""
