"""The ground floor: errors, settings, schema, configuration, world and the task contract."""
