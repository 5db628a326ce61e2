#!/usr/bin/env bash
# The first start of the image postgres:17.5, as far as docker-compose.yml relies on it: a data folder of the superuser
# POSTGRES_USER, a temporary server on the socket alone for the scripts in INIT_FOLDER, then the server on TCP. Who comes
# over TCP needs a password, as from another container.
set -euo pipefail
initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") --encoding=utf8 --auth-local=trust \
  --auth-host=scram-sha-256 --no-sync --pgdata="$PGDATA"
pg_ctl --pgdata="$PGDATA" --wait --options="-c listen_addresses='' -k $PGHOST" start
createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
for script in "$INIT_FOLDER"/*; do
  case $script in # the image leaves other endings alone
    *.sh) bash "$script" ;;
    *.sql) psql --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" -v ON_ERROR_STOP=1 -f "$script" ;;
  esac
done
pg_ctl --pgdata="$PGDATA" --wait --mode=fast stop
exec postgres -D "$PGDATA" -k "$PGHOST" -c listen_addresses=127.0.0.1 -c fsync=off
