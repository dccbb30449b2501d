# The table and the bucket of a dynamodb:// store, and the policies of the processes that use it.

variable "table_name" {
  type    = string
  default = "site-cache"
}

variable "bucket_name" {
  type = string
}

variable "body_days" {
  type        = number
  default     = 30
  description = "Bodies are deleted so long after they were written; longer than any page is kept"
}

resource "aws_dynamodb_table" "cache" {
  name         = var.table_name
  billing_mode = "PAY_PER_REQUEST"
  hash_key     = "pk"
  range_key    = "sk"

  attribute {
    name = "pk"
    type = "S"
  }

  attribute {
    name = "sk"
    type = "S"
  }

  ttl {
    attribute_name = "ttl"
    enabled        = true
  }
}

resource "aws_s3_bucket" "pages" {
  bucket = var.bucket_name
}

resource "aws_s3_bucket_public_access_block" "pages" {
  bucket                  = aws_s3_bucket.pages.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_lifecycle_configuration" "pages" {
  bucket = aws_s3_bucket.pages.id

  rule {
    id     = "bodies-without-a-row"
    status = "Enabled"

    filter {}

    expiration {
      days = var.body_days
    }
  }
}

locals {
  statements = jsondecode(templatefile("${path.module}/policy.json", {
    table_arn  = aws_dynamodb_table.cache.arn
    bucket_arn = aws_s3_bucket.pages.arn
  })).Statement
}

resource "aws_iam_policy" "of" {
  for_each    = toset(["Read", "Render", "Evict"])
  name_prefix = "${var.table_name}-${lower(each.key)}-"

  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [for it in local.statements : it if startswith(it.Sid, each.key)]
  })
}

output "store" {
  value = "dynamodb://${aws_dynamodb_table.cache.name}?bucket=${aws_s3_bucket.pages.bucket}"
}

output "policies" {
  value = { for name, policy in aws_iam_policy.of : name => policy.arn }
}
