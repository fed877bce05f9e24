"""Judges: models behind an API, and a scripted one; what keeps calls to them within bounds."""
