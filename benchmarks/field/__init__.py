"""What serving engines of the field capture: steps, families and ladders to compare with."""
