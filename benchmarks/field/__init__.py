"""The steps, families and ladders of the field's engines, to compare with."""
