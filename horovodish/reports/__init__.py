"""Timelines, reports of runs, and which ranks were last."""
