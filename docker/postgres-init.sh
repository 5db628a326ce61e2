#!/usr/bin/env bash
# Runs once, when Postgres makes its data folder: the dashboard's role, which reads whatever the migration makes later.
set -euo pipefail
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
  -v password="$NSA_DASHBOARD_PASSWORD" -f /docker-entrypoint-initdb.d/roles.psql
