"""Charts: lines over axes, as text or as a picture. No torch."""

from colossus.chart.draw_picture import save_charts
from colossus.chart.draw_text import in_encoding, text_chart
from colossus.chart.panel import Line, Panel

__all__ = ["Line", "Panel", "in_encoding", "save_charts", "text_chart"]
