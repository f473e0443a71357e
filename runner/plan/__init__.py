"""Planning: inventory + configuration -> Plan with reasons."""
