#!/usr/bin/env bash
# Runs once, when Postgres makes its data folder. Three roles: the superuser, who from here on has no password and so is
# reached from inside the container only; `nsa`, which owns the database, for jobs and the migration; the dashboard's,
# which reads whatever the migration makes later. psql takes both passwords from the environment, as `ps` shows arguments.
set -euo pipefail
admin() { psql -v ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" "$@"; }
roles=${ROLES_SQL:-/docker-entrypoint-initdb.d/roles.psql}

admin <<'END'
\getenv password POSTGRES_PASSWORD
CREATE ROLE nsa LOGIN CREATEROLE PASSWORD :'password';
SELECT format('ALTER DATABASE %I OWNER TO nsa', current_database()) \gexec
END
psql --username nsa --dbname "$POSTGRES_DB" -f "$roles"
admin <<'END'
ALTER ROLE nsa NOCREATEROLE;
ALTER ROLE CURRENT_USER PASSWORD NULL;
END
