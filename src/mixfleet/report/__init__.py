"""Views of plans and traces: terminal tables, one HTML file, Chrome/Perfetto traces."""
