"""PostgreSQL: the tables of the trajectory service and every query on them."""
