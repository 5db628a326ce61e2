#!/usr/bin/env bash
# Runs once, when Postgres makes its data folder: the owner of the tables, and a role that can only read them.
set -euo pipefail
psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
  -v reader_password="$NSA_READER_PASSWORD" -f /docker-entrypoint-initdb.d/reader.psql
