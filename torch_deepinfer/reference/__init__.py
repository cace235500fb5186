"""The operators in plain torch: the specification that every device is tested against. Depends on torch only."""
