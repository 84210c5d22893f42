"""Charts: lines over axes and stacked bars, as text or as a picture. No torch."""

from colossus.chart.draw_picture import save_charts
from colossus.chart.draw_text import in_encoding, text_chart
from colossus.chart.panel import Bars, Line, Panel

__all__ = ["Bars", "Line", "Panel", "in_encoding", "save_charts", "text_chart"]
