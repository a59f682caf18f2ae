#!/usr/bin/env bash
# Install a real VS Code from npm into a folder, for the tests of editors/vscode: code-server, which serves the editor to
# a browser. Nothing but the npm registry is asked where Node brings its headers (/usr/include/node); the two native
# modules without which the editor does not start are compiled, and the others (terminal, search) are left out.
#
#     bash tools/code_server.sh build/code-server
set -euo pipefail
readonly VERSION=4.100.3 NODE=20 FOLDER=${1:?folder to install into}

found=$(node -p 'process.versions.node.split(".")[0]') || { echo "code-server $VERSION needs Node $NODE" >&2; exit 1; }
if [[ $found != "$NODE" ]]; then
    echo "code-server $VERSION needs Node $NODE, and this is Node $found" >&2
    exit 1
fi
mkdir -p "$FOLDER"
cd "$FOLDER"
[[ $(cat .complete 2>/dev/null) == "$VERSION" ]] && exit
node=$(node -p 'require("path").resolve(process.execPath, "../..")')
[[ -d $node/include/node ]] && export npm_config_nodedir=$node
quiet=(--ignore-scripts --no-audit --no-fund --loglevel=error)

# code-server's own npm-shrinkwrap.json files pin what it depends on.
npm install "${quiet[@]}" --no-save --prefix . "code-server@$VERSION"
npm rebuild --loglevel=error --prefix . argon2 --build-from-source
cd node_modules/code-server/lib/vscode
npm install "${quiet[@]}" --omit=dev
npm rebuild --loglevel=error @vscode/spdlog native-watchdog
ln -sfn node_modules node_modules.asar
cd - >/dev/null
echo "$VERSION" >.complete
