"""The one place where the version stands; the build reads it from here."""

__version__ = "0.1.0"
