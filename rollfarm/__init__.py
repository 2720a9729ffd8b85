"""The kit that every rollfarm service and plug-in shares. Nothing here imports a service."""

__version__ = "0.1.0"
