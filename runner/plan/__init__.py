"""What the machine has, and what follows from it: inventory + configuration -> Plan with reasons."""
