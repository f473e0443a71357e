"""Fake secrets, one for each variable name and each format. Tests search for them to find leaks."""

from __future__ import annotations

import random
import string

# Names of environment variables that hold secrets.
NAMES = (
    "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "MY_PASSWORD",
    "OPENAI_API_KEY", "SLURM_JWT", "MY_PASS", "MY_PW", "DB_PWD", "DB_PASSWD", "PGPASSWORD", "SSHPASS", "MYSQL_PASS",
    "REDIS_PASSWORD", "KEY_PASSPHRASE", "VPN_PASSCODE", "CLIENT_SECRET", "APP_SECRETS", "AWS_CREDENTIALS", "GIT_CREDS",
    "SESSION_COOKIE", "COOKIES", "PROXY_AUTHORIZATION", "NPM_AUTH", "SENTRY_DSN", "DATABASE_DSN", "DATABASE_URL",
    "SLACK_WEBHOOK", "SLACK_WEBHOOK_URL", "GITHUB_PAT", "MY_PAT", "WANDB_KEY", "SIGNING_KEY", "ENCRYPTION_KEY",
    "STORAGE_ACCOUNT_KEY", "LICENSE_KEY", "SERVICE_KEY", "SSH_PRIVATE_KEY", "BEARER", "ACCESS_TOKEN_SECRET",
    "AZURE_STORAGE_CONNECTION_STRING", "DOCKER_AUTH_CONFIG", "AWS_BEARER_TOKEN_BEDROCK", "API_KEY_2", "API_TOKEN_1",
    "apiToken", "dbPassword", "URL_SIG", "X_SIGNATURE", "DB_URL", "REDIS_URL", "SLACK_HOOK", "BLOB_SAS", "TLS_PEM",
    "SSH_KEY", "MASTER_KEY", "sshkey", "GHTOKEN", "CONN_STR", "OPENAI_KEY", "LOGIN_PIN", "LOGIN_OTP", "SESSION_ID",
    "OTP_SEED", "WALLET_MNEMONIC", "GITHUB_RECOVERY_CODES",
)  # fmt: skip
DIGITS, UPPER = string.digits, string.digits + string.ascii_uppercase
HEX, PLAIN = string.digits + "abcdef", string.ascii_letters + string.digits
# {kind:count} stands for `count` characters of that kind.
SHAPES = (
    "-----BEGIN OPENSSH PRIVATE KEY-----{plain:70}", "https://me:{plain:20}@host/x.git", "postgres://:{plain:20}@host/db",
    "https://{plain:30}@host/x.git", "https://hooks.slack.com/services/T{upper:8}/B{upper:8}/{plain:24}",
    "https://discord.com/api/webhooks/{digits:18}/{plain:60}", "AKIA{upper:16}", "ASIA{upper:16}", "AIza{plain:35}",
    "ya29.{plain:60}", "GOCSPX-{plain:28}", "AccountName=x;AccountKey={plain:86}==;", "SharedAccessKey={plain:43}=",
    "https://x.blob.core.windows.net/y?sv=1&sig={plain:40}%3D", "X-Amz-Signature={hex:64}",
    "X-Amz-Security-Token={plain:90}",
    "dop_v1_{hex:64}", "dapi{hex:32}", "hvs.{plain:24}", "hf_{plain:34}", "api_org_{plain:34}", "wandb_v1_{plain:70}",
    "wandb login {hex:40}", "sk-{plain:48}", "sk-proj-{plain:60}", "sk-ant-api03-{plain:90}", "sk-or-v1-{hex:64}",
    "nvapi-{plain:64}", "gsk_{plain:52}", "r8_{plain:37}", "pplx-{plain:48}", "xai-{plain:80}", "rpa_{plain:40}",
    "ghp_{plain:36}", "gho_{plain:36}", "ghu_{plain:36}", "ghs_{plain:36}", "ghr_{plain:36}", "github_pat_{plain:82}",
    "glpat-{plain:20}", "gldt-{plain:20}", "npm_{plain:36}", "pypi-AgEIcHlwaS5vcmc{plain:80}", "ATATT3{plain:90}",
    "xoxb-{digits:12}-{plain:24}", "xoxp-{digits:12}-{plain:24}", "xapp-1-{upper:11}-{plain:40}", "sk_live_{plain:24}",
    "rk_test_{plain:24}", "whsec_{plain:32}", "SG.{plain:22}.{plain:43}", "shpat_{hex:32}",
    "eyJ{plain:33}.eyJ{plain:60}.{plain:43}", "Authorization: Bearer {plain:40}", "Authorization: Basic {plain:32}==",
    "dckr_pat_{plain:27}", "ATBB{plain:32}", "lin_api_{plain:40}", "ntn_{plain:46}", "figd_{plain:40}",
    "glsa_{plain:32}_{hex:8}", "glc_{plain:60}", "PMAK-{hex:24}-{hex:34}", "lsv2_pt_{hex:32}_{hex:10}",
    "pcsk_{plain:60}", "tskey-auth-{plain:17}-{plain:32}", "NRAK-{upper:27}", "HRKU-{plain:36}",
    "AGE-SECRET-KEY-1{upper:58}",
    "rubygems_{hex:48}", "shpss_{hex:32}", "sbp_{hex:40}", "pscale_tkn_{plain:43}", "doo_v1_{hex:64}",
    "dp.pt.{plain:43}", "hvb.{plain:90}", "SK{hex:32}", "key-{hex:32}", "1234567890:AA{plain:33}",
    "MTk{plain:23}.{plain:6}.{plain:38}",
    "https://x.webhook.office.com/webhookb2/{hex:32}@{hex:32}/IncomingWebhook/{hex:32}/{hex:32}",
    "abc8Q~{plain:34}", "tfp_{plain:59}", "pul-{hex:40}", "EAACEdEose0cBA{plain:60}", "AQVN{plain:35}",
    "kgat_{hex:32}", "ops_eyJ{plain:200}", "sntrys_eyJ{plain:80}", "nfp_{plain:36}", "jina_{plain:60}",
    "tvly-dev-{plain:32}", "CFPAT-{plain:43}", "csk-{plain:48}", "fw_{plain:24}", "tgp_v1_{plain:43}",
    "FlyV1 fm2_{plain:100}", "x.atlasv1.{plain:64}",
    "pat{plain:14}.{hex:64}", "sb_secret_{plain:31}", "sl.{plain:130}", "pa-{plain:43}", "sq0csp-{plain:43}",
    "sq0atp-{plain:22}", "ATCTT3xFf{plain:180}", "dGhpc2lz{plain:11}:APA91b{plain:134}", "ak-{plain:22}",
    "as-{plain:22}", "curl -u me:{plain:20} https://host", "shippo_live_{hex:40}", "EAAAE{plain:59}",
    "sk_prod_{plain:24}", "dt0c01.{upper:24}.{upper:64}", "duffel_live_{plain:43}", "EZAK{plain:54}",
    "FLWSECK-{hex:32}-X", "frio_{plain:40}", "glsoat-{plain:20}", "glimt-{plain:25}", "glagent-{plain:50}",
    "glffct-{plain:20}", "secret_{plain:43}",
    "rdme_{hex:70}", "sntryu_{hex:64}", "sntrya_{hex:64}",
    "PRIVATE-TOKEN: {plain:20}", "xkeysib-{hex:64}-{plain:16}", "xsmtpsib-{hex:64}-{plain:16}",
    "typeform tfp_{plain:59}", "ubiops Token {hex:40}", "vercel vcp_{plain:24}",
 "easypost EZTK{plain:54}", "fo1_{plain:43}", "fm1r_{plain:100}",
    "hf_oauth_{plain:34}", "phx_{plain:43}", "phc_{plain:43}",
    "re_{plain:8}_{plain:24}", "sess-{plain:40}", "cfut_{plain:40}", "v1.0-{hex:24}-{hex:146}", "CLOJARS_{hex:60}",
    "p8e-{plain:32}", "xoxd-{plain:60}", "sgp_{hex:40}", "shpua_{hex:32}", "bkua_{hex:40}", "ABSK{plain:109}",
    "LTAI{plain:20}", "AKID{plain:32}", "snyk_uat.{plain:8}.{plain:60}", "nomic nk-{plain:43}", "mlflow dkea{hex:32}",
    "aio_{plain:28}", "ctx7sk-{hex:32}", "fc-{hex:32}", "bb_live_{plain:27}", "gAAAAAB{plain:93}",
    "lsv2_sk_{hex:32}_{hex:10}", "github https://x-access-token:{plain:40}@github.com/a/b",
    "wandb_key={hex:40}", "password: hunter2{plain:16}", '"client_secret": "{plain:24}"', "Cookie: {plain:30}",
)  # fmt: skip
KINDS = {"digits": DIGITS, "upper": UPPER, "hex": HEX, "plain": PLAIN}


def make_secret(shape: str, dice: random.Random) -> tuple[str, list[str]]:
    """Return a text of this shape, and the parts of it that must not be visible."""
    text, parts = "", []
    for piece in shape.replace("}", "{").split("{"):
        kind, _, count = piece.partition(":")
        if kind in KINDS and count.isdigit():
            part = (
                "".join(dice.choices(KINDS[kind], k=int(count) - 2))
                + dice.choice(DIGITS)
                + dice.choice("abcdef" if kind == "hex" else DIGITS)
            )
            parts += [part] if len(part) > 14 else []  # shorter parts identify an account and are not secret
            text += part
        else:
            text += piece
    return text, parts


def make_values(dice: random.Random) -> dict[str, str]:
    """Return a value for each name: in turn plain, with characters that output formats escape, and inside a URL."""
    result = {}
    for number, name in enumerate(NAMES):
        core = "canary" + "".join(dice.choices(PLAIN, k=22)) + "1a"
        result[name] = (core, f'{core}"&é\\{core[::-1]}', f"scheme://host/{core}?x")[number % 3]
    return result
