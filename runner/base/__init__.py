"""Shared foundation: errors, settings, schema, configuration, world and the task contract."""
