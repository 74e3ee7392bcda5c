"""Airflow's provider for keytail: a hook over Connections, operators, and what the DAGs share."""
